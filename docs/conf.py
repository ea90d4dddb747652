"""How Sphinx builds these pages (`make docs`). The reference is generated in each build, so it is never stale."""

import gc
import sys
from functools import cache
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx
from sphinx.domains.python import PythonDomain

gc.set_threshold(50_000)  # or a quarter of the time goes into looking for garbage among what was read

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from generated import as_restructured_text, write_commands, write_deviations, write_environment  # noqa: E402 - found by the line above

project = "bookwheel"
project_copyright = "the authors of bookwheel; Apache-2.0"
html_theme = "furo"
html_title = project
exclude_patterns = ["_build"]
extensions = [
    "myst_parser",
    "sphinx.ext.apidoc",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
]
suppress_warnings = ["ref.python"]  # `bytes` of a signature may mean a field of that name, too: the type is meant

myst_heading_anchors = 3
copybutton_prompt_text = "$ "
copybutton_line_continuation_character = "\\"

PUBLIC = {"client", "corpus", "encoders", "errors", "evaluation", "index", "reading", "retrieve", "store"}
LIBRARY = HERE.parent / "rag_model"
apidoc_modules = [
    {
        "path": LIBRARY,
        "destination": "reference/python",
        "exclude_patterns": [
            *(f"{path}*" for path in LIBRARY.iterdir() if path.stem not in PUBLIC | {"__init__"}),
            f"{LIBRARY}/corpus/markup/*",
        ],
        "separate_modules": False,
        "module_first": True,
        "max_depth": 1,
        "automodule_options": {"members", "show-inheritance"},
    }
]
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_use_type_comments = False  # there are none, and to look for them is a twelfth of the build
default_role = "code"


class QuickPythonDomain(PythonDomain):
    """Skips the search for names that no object has, such as `int`, which took half of the build."""

    def find_obj(self, env: Any, modname: str, classname: str, name: str, *options: Any) -> list[tuple[str, Any]]:
        if name.removesuffix("()").rpartition(".")[2] not in self._list_short_names(len(self.objects)):
            return []
        return super().find_obj(env, modname, classname, name, *options)

    @cache  # noqa: B019 - a build has one domain; the number of objects makes the names current
    def _list_short_names(self, n_objects: int) -> set[str]:
        return {name.rpartition(".")[2] for name in self.objects}


def setup(app: Sphinx) -> None:
    """Generate the page of commands, and read docstrings as the Markdown that they are."""
    pages = {"commands": write_commands, "environment": write_environment, "deviations": write_deviations}
    for name, write in ((f"{name}.md", write) for name, write in pages.items()):
        app.connect("builder-inited", lambda app, n=name, w=write: w(Path(app.srcdir) / "reference" / n), priority=1)
    app.add_domain(QuickPythonDomain, override=True)
    app.connect("autodoc-process-docstring", as_restructured_text, priority=1)  # before napoleon
