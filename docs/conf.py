"""How Sphinx builds this site: `make docs`."""

import re

from sphinx.application import Sphinx

import fxopt

project = "fxopt"
author = copyright = "the fxopt authors"
release = version = fxopt.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
exclude_patterns = ["_build"]

myst_heading_anchors = 3
myst_enable_extensions = ["colon_fence"]

autodoc_typehints = "none"
autodoc_member_order = "bysource"
napoleon_use_ivar = True
napoleon_custom_sections = ["Returns"]  # sentences, in which a colon ends no type
default_role = "code"  # docstrings write `name` as Markdown does

html_theme = "furo"
html_title = f"fxopt {release}"
html_static_path = ["static"]
html_css_files = ["fxopt.css"]


def setup(app: Sphinx) -> None:
    app.connect("source-read", lambda app, page, source: _link_to_pages(source))
    app.connect("include-read", lambda app, file, page, source: _link_to_pages(source))


def _link_to_pages(source: list[str]) -> None:
    """Reports and files of the root are read in the repository and on this site: a link to one leads to its page here."""
    source[0] = re.sub(r"\]\(\.\./reports/baseline/(\w+)\.md", r"](figures/\1.md", source[0])
    source[0] = re.sub(r"\]\(([A-Z]+)\.md\)", lambda found: f"]({found[1].lower()}.md)", source[0])
