"""Models and passes of a repository that is not fxopt's."""
