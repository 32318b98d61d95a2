"""The documentation site: ``pip install '.[docs]' && sphinx-build docs site``."""

from docutils import nodes
from latex2mathml.converter import convert

import attn_engine

project = "attn_engine"
author = "The attn_engine authors"
copyright = author
release = attn_engine.__version__

extensions = [
    "myst_parser",
    "numpydoc",
    "sphinx.ext.autodoc",
    "sphinx.ext.viewcode",
]
myst_enable_extensions = ["colon_fence", "dollarmath"]
myst_heading_anchors = 3
numpydoc_show_class_members = False
autodoc_typehints = "none"
autodoc_mock_imports = ["autograd", "ml_dtypes"]  # the reference needs neither
default_role = "code"

html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_title = f"attn_engine {release}"
html_show_sphinx = False
html_math_renderer = "mathml"


def setup(app):
    """Formulas as MathML, which browsers show without a script from the network."""

    def visit(translator, node):
        display = "block" if isinstance(node, nodes.math_block) else "inline"
        translator.body.append(convert(node.astext(), display=display))
        raise nodes.SkipNode

    app.add_html_math_renderer("mathml", (visit, None), (visit, None))
