"""Settings of the documentation site. `make site` builds it, and CONTRIBUTING.md says how."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "_site"))

from ebbtide.version import __version__

project = "ebbtide"
author = copyright = "The ebbtide authors"
version = release = __version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "site_pages",
    "site_names",
    "site_commands",
]
exclude_patterns = ["_site"]
default_role = "py:obj"  # single backticks in docstrings: a link if the site has the name
nitpicky = True
nitpick_ignore = [  # types that a reader of the reference need not know
    ("py:class", "ebbtide.runtime.forward.OffloadedForward"),
    ("py:class", "ebbtide.session.T"),
    ("py:class", "ebbtide.handle.OptimizerT"),
    ("py:class", "ebbtide.planning.profile.StepProfile"),
    ("py:class", "ebbtide.devices.device.Layer"),
]

myst_enable_extensions = ["attrs_block", "colon_fence"]
myst_heading_anchors = 4

python_use_unqualified_type_names = True
toc_object_entries_show_parents = "hide"
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_class_signature = "mixed"
autodoc_mock_imports = ["accelerate", "lightning", "neuralop", "pytorch_lightning", "transformers"]
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_custom_sections = [("Shape", "params_style"), "Streams", "Not modelled", "Source"]

html_theme = "pydata_sphinx_theme"
html_title = "ebbtide"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = html_show_sourcelink = False
html_last_updated_fmt = None
html_theme_options = {
    "github_url": "https://github.com/ebbtide/ebbtide",
    "header_links_before_dropdown": 6,
    "navbar_align": "left",
    "navigation_with_keys": False,
    "show_nav_level": 2,
    "show_toc_level": 2,
    "footer_start": ["copyright"],
    "footer_end": [],
    "pygments_light_style": "a11y-high-contrast-light",
    "pygments_dark_style": "a11y-high-contrast-dark",
}
html_sidebars = {"quickstart": [], "faq": [], "examples": [], "benchmarks": [], "platforms": []}
copybutton_prompt_text = r"\$ "
copybutton_prompt_is_regexp = True
