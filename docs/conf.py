"""How Sphinx makes the site from these pages: `make docs`. The pages are Markdown, and can be read without it."""

from __future__ import annotations

import argparse
import html
import os
import re
import sys
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path
from types import ModuleType
from typing import Any

from docutils import nodes
from docutils.statemachine import StringList
from sphinx.application import Sphinx
from sphinx.util import logging
from sphinx.util.docutils import SphinxDirective

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"


class Compiled(ModuleType):
    """In place of the compiled module, so that the site needs no compiler."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {"__module__": "ringreduce._C"})

    def tries_first(self, *_: Any) -> Any:
        return lambda function: function


sys.modules["ringreduce._C"] = Compiled("ringreduce._C")

import ringreduce  # noqa: E402
from ringreduce import cli, config  # noqa: E402

ringreduce._C = sys.modules["ringreduce._C"]

project = "ringreduce"
copyright = "the ringreduce contributors"
version = release = ringreduce.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc"]
html_theme = "furo"
html_title = f"ringreduce {release}"
html_show_sourcelink = False
html_static_path = ["site.css"]
html_css_files = ["site.css"]

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4
linkcheck_timeout = 10

default_role = "code"
add_module_names = False
autodoc_member_order = "bysource"
autodoc_inherit_docstrings = False  # those of torch's classes
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
autodoc_type_aliases = {name: name for name in ("Array", "ReduceOp", "Group", "Rank", "Work")}
python_maximum_signature_line_length = 100
python_use_unqualified_type_names = True


def as_rst(app: Sphinx, what: str, name: str, value: Any, options: Any, lines: list[str]) -> None:
    """Docstrings are written to be read as they are: indented lines are code, "`name`: ..." explains an argument."""
    made: list[str] = []
    inside = ""  # of what: "code", "argument" or neither
    for said in lines:
        argument = re.match(r"`\w+`(, `\w+`)*: ", said)
        if not said.startswith(" ") and said:
            inside = "argument" if argument else ""
        elif said.startswith("    ") and inside != "argument":
            if inside != "code" and not made[-1].strip():
                made += ["::", ""]
            inside = "code"
        line = re.sub(r"docs/(\w+)\.md", r":doc:`/\1`", said)  # which must be there
        if argument:
            line = "- " + line
        elif inside == "argument" and line:
            line = "  " + line.strip()
        begins, ends = argument, not argument and inside == "" and not line.startswith((" ", "- ")) and line
        if made and (
            (begins and not made[-1].startswith(("- ", "  "))) or (ends and made[-1].startswith(("- `", "  ")))
        ):
            made.append("")
        made.append(line)
    lines[:] = made


CALLED = ("Options", "P2POp", "Plan", "Channel", "Step", "Embedding", "EmbeddingBag")


def short_names(
    app: Sphinx, what: str, name: str, value: Any, options: Any, signature: str | None, returns: str | None
) -> tuple[str | None, str | None]:
    """Aliases of types as they are called in the code; no arguments of classes that programs do not call."""
    if signature and what in ("class", "exception") and name.rpartition(".")[2] not in CALLED:
        return "", None

    def short(text: str | None) -> str | None:
        return text and re.sub(r"TypeAliasForwardRef\('(\w+)'\)", r"\1", text)

    return short(signature), short(returns)


class Generated(SphinxDirective):
    """What a page has from the code."""

    def markdown(self, lines: Iterable[str]) -> list[nodes.Node]:
        where = nodes.section()
        where.document = self.state.document
        self.state.nested_parse(StringList(list(lines), source="generated"), 0, where)
        return where.children


def cell(text: str) -> str:
    """Text of the code as a cell: quoted words as code, pages as links."""
    text = re.sub(r"(?<!\w)'([^']*)'(?!\w)", r"`\1`", text.replace("|", r"\|"))
    return re.sub(r"docs/(\w+)\.md", r"[](../\1.md)", text)


class OptionsTable(Generated):
    """Every field of `ringreduce.Options` with its variable, the parts of `engine`, then the other variables."""

    def run(self) -> list[nodes.Node]:
        rows = ["| option, variable | values (default) | what it is |", "|---|---|---|"]
        for knob in (*fields(config.Options), *fields(config.EngineParts)):
            default, allowed = knob.metadata["default"], knob.metadata["allowed"]
            of_bytes = knob.name.endswith("_bytes")
            if allowed is None:
                values = "text"
            elif isinstance(allowed[0], str):
                values = ", ".join(f"`{word}`" for word in allowed)
            else:
                values = " to ".join(size(number) if of_bytes else f"{number:,}" for number in allowed)
            if default != "":
                values += f" (`{size(default) if of_bytes else default}`)"
            of_engine = knob.name in config.PARTS
            variable = "part of `engine`" if of_engine else f"`{config.PREFIX}{knob.name.upper()}`"
            rows.append(f"| `{knob.name}` {variable} | {values} | {cell(knob.metadata['help'])} |")
        rows += [f"| `{name}` | text | {cell(help)} |" for name, help in config.OTHER_VARIABLES.items()]
        made = self.markdown(rows)
        for table in made:
            table["classes"].append("options")  # of site.css
        return made


def size(count: int) -> str:
    for unit in "PTGMK":
        power = 1024 ** (" KMGTP".index(unit))
        if count >= power and count % power == 0:
            return f"{count // power}{unit}"
    return str(count)


class CommandLine(Generated):
    """The help of every command, from its parser."""

    def run(self) -> list[nodes.Node]:
        os.environ["COLUMNS"] = "100"
        os.environ["NO_COLOR"] = "1"
        commands = argparse.ArgumentParser(prog="ringreduce").add_subparsers(parser_class=cli.Parser)
        lines: list[str] = []
        for name, summary in cli.COMMANDS.items():
            cli.add_command(commands, name)
            help = commands.choices[name].format_help()
            lines += [f"({name})=", f"**ringreduce {name}**: {summary}", "", "```text", *help.splitlines(), "```", ""]
        return self.markdown(lines)


OF_SPHINX = {"search", "genindex", "py-modindex"}


def no_page_is_lost(app: Sphinx, failure: Exception | None) -> None:
    """Sphinx writes pages of its own after ours, without a word where one of ours has the name."""
    if failure or app.builder.name != "html":
        return
    for name in sorted(app.env.found_docs):
        heading = re.search("<h1>(.*?)<a ", Path(app.builder.get_outfilename(name)).read_text(), re.DOTALL)
        title = app.env.titles[name].astext()
        if name in OF_SPHINX or heading is None or html.unescape(re.sub("<.*?>", "", heading[1])) != title:
            logging.getLogger(__name__).warning("docs/%s.md, %r, is not in the site: rename the page", name, title)


def setup(app: Sphinx) -> None:
    app.connect("build-finished", no_page_is_lost)
    app.connect("autodoc-process-docstring", as_rst)
    app.connect("autodoc-process-signature", short_names)
    app.add_directive("options-table", OptionsTable)
    app.add_directive("command-line", CommandLine)
