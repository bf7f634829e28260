"""Loads the plugin of a checkout that is only on the path; pytest loads an installed plugin by its entry point."""

import importlib.metadata

if not importlib.metadata.entry_points(group="pytest11", name="pytest_fxopt"):
    pytest_plugins = ["pytest_fxopt"]
