"""Hooks of mkdocs: pages made from files outside docs/, and links to these pages.

The README is the first page. The reference is made from docstrings, the schema of the configuration and the command
line, and the page of examples from their files. A link from a page to another file of the repository leads to the file
on GitHub, and to a page that shows the file on the site.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import posixpath
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
GOLDEN = ROOT / "tests/golden"
# Files of the repository that are pages, by the place of their page.
PAGES = {"README.md": "index.md", "CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md"}
# Sections of a page that the navigation lists below the page.
SECTIONS = {
    "launching.md": {
        "Notebooks": "a-script-a-notebook",
        "Several machines and schedulers": "several-machines",
        "Crashes and restarts": "crashes-restarts-and-preemption",
        "TPU": "tpu",
    }
}
MODULES = (
    *("zero_plugin", "big_modeling", "data_loader", "hooks", "launchers", "local_sgd", "logging"),
    *("long_context", "optimizer", "scheduler", "state", "tracking", "utils", "errors"),
)
_ABOUT_KEYS = """This page is made from the schema with which `zero-plugin check` checks a file. `auto` is allowed for
every key and leaves its value to the run. The [guide](../configuration.md) shows how files, flags and code combine."""
_LINK = re.compile(r"(?<=\]\()([^)\s]+)(?=\))|(?<=\]: )(\S+)$", re.MULTILINE)
_FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
_LANGUAGES = {".py": "python", ".yaml": "yaml", ".json": "json", ".toml": "toml"}


# ---- what mkdocs calls ---------------------------------------------------------------------------------------------


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that are not files of docs/."""
    from mkdocs.structure.files import File

    pages = {page: (ROOT / source).read_text("utf-8") for source, page in PAGES.items()}
    pages |= {"examples.md": examples_page(), **reference_pages()}
    linked = [*pages.values(), *(file.content_string for file in files.documentation_pages())]
    sources = {target for text in linked for target in _files_linked(text)}
    pages |= {f"{_source_page(target)}": _source_text(target) for target in sorted(sources)}
    for place, text in pages.items():
        files.append(File.generated(config, place, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Turn links between files of the repository into links between pages."""
    source = next((s for s, place in PAGES.items() if place == page.file.src_uri), f"docs/{page.file.src_uri}")
    return link_pages(markdown, source, page.file.src_uri)


def on_nav(nav: Any, **_: Any) -> Any:
    """Add the sections of `SECTIONS` to the navigation."""
    from mkdocs.structure.nav import Link

    for section in nav.items:
        for page in list(getattr(section, "children", None) or ()):
            sections = SECTIONS.get(page.file.src_uri, {}) if page.is_page else {}
            links = [Link(title, f"{page.url}#{anchor}") for title, anchor in sections.items()]
            for link in links:
                link.parent = section
            place = section.children.index(page) + 1
            section.children[place:place] = links
    return nav


# ---- links ---------------------------------------------------------------------------------------------------------


def link_pages(markdown: str, source: str, place: str) -> str:
    """Return Markdown whose relative links lead to pages.

    Args:
        markdown: text of a file of the repository.
        source: path of that file.
        place: path of its page below docs/.
    """

    def replace(match: re.Match[str]) -> str:
        target, _, anchor = match[0].partition("#")
        if "://" in target or not target:
            return match[0]
        found = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        if found in PAGES:
            page = PAGES[found]
        elif found.startswith("docs/"):
            page = found.removeprefix("docs/")
        else:
            page = _source_page(found)
        link = posixpath.relpath(page, posixpath.dirname(place) or ".")
        return f"{link}#{anchor}" if anchor else link

    # Links in code are text, so code stays unchanged.
    parts, position = [], 0
    for fence in _FENCE.finditer(markdown):
        parts += [_LINK.sub(replace, markdown[position : fence.start()]), fence[0]]
        position = fence.end()
    return "".join([*parts, _LINK.sub(replace, markdown[position:])])


def _files_linked(text: str) -> Iterator[str]:
    """Yield files and folders outside docs/ that a page links to and that are no pages themselves."""
    for match in _LINK.finditer(_FENCE.sub("", text)):
        target = match[0].partition("#")[0]
        inside = posixpath.normpath(target.lstrip("./"))
        is_page = inside in PAGES or inside.startswith("docs/")
        if target and "://" not in target and not is_page and (ROOT / inside).exists():
            yield inside


def _source_page(file: str) -> str:
    return f"source/{file.replace('/', '-')}.md"


def _source_text(file: str) -> str:
    """Return the page that shows a file, or all files of a folder."""
    path = ROOT / file
    if path.is_file():
        return f"# {file}\n\n{_code(path)}"
    shown = [inside for inside in sorted(path.iterdir()) if inside.is_file()]
    return "\n\n".join([f"# {file}", *(f"## {inside.name}\n\n{_code(inside)}" for inside in shown)])


def _code(path: Path) -> str:
    return f"```{_LANGUAGES.get(path.suffix, '')}\n{path.read_text('utf-8').rstrip()}\n```\n"


# ---- pages made from code ------------------------------------------------------------------------------------------


def examples_page() -> str:
    """Return the page of examples: what each shows, its commands, and its text."""
    parts = ["# Examples\n\nEach is a script of one screen, which the tests run by the commands at its top."]
    for path in sorted((ROOT / "examples").glob("*.py")):
        docstring = ast.get_docstring(ast.parse(path.read_text("utf-8"))) or ""
        title, commands, *rest = docstring.split("\n\n")
        title = re.sub(r"\s+", " ", title)
        more = "\n\n".join(rest)
        parts.append(f"## {path.stem}\n\n{title}\n\n```\n{commands}\n```\n\n{more}\n\n{_code(path)}")
    return "\n\n".join(parts)


def reference_pages() -> dict[str, str]:
    """Return all pages of the reference by place: the public modules, the configuration, the command line."""
    pages = {"reference/accelerator.md": "# Accelerator\n\n::: zero_plugin.accelerator.Accelerator\n"}
    shown = {"zero_plugin.accelerator.Accelerator"}
    for name in MODULES:
        pages[f"reference/{name}.md"] = module_page(name, shown)
    return pages | {"reference/configuration.md": configuration_page(), "reference/commands.md": commands_page()}


def module_page(name: str, shown: set[str]) -> str:
    """Return the page of a public module: its names, except those that earlier pages show.

    Args:
        name: of the module, without the package's.
        shown: paths of objects that other pages show; this page's are added.
    """
    module = importlib.import_module(name if name == "zero_plugin" else f"zero_plugin.{name}")
    title = (module.__doc__ or "").partition("\n\n")
    parts = [f"# {module.__name__}", title[0], title[2] and f"```text\n{title[2].rstrip()}\n```"]
    elsewhere = []
    for public in sorted(public_names(module), key=str.lower):
        thing = getattr(module, public)
        path = f"{getattr(thing, '__module__', '')}.{getattr(thing, '__qualname__', '')}"
        if not path.startswith("zero_plugin.") or not (inspect.isclass(thing) or inspect.isfunction(thing)):
            elsewhere.append(f"`{public}`")
        elif path in shown:
            elsewhere.append(f"[`{public}`][{path}]")
        else:
            shown.add(path)
            parts.append(f"::: {path}")
    if elsewhere:
        parts.insert(2, f"Also here: {', '.join(elsewhere)}.")
    return "\n\n".join(filter(None, parts)) + "\n"


def public_names(module: Any) -> list[str]:
    """Return the names that a module exports: `__all__`, or what it defines or imports under the same name."""
    if hasattr(module, "__all__"):
        return list(module.__all__)
    source = Path(module.__file__).read_text("utf-8")
    names: list[str] = []
    for node in ast.parse(source).body:
        if isinstance(node, ast.ImportFrom):
            names += [alias.asname for alias in node.names if alias.asname == alias.name]
        elif isinstance(node, ast.ClassDef | ast.FunctionDef):
            names.append(node.name)
    return [name for name in names if not name.startswith("_")]


def configuration_page() -> str:
    """Return the page of every key of a launch YAML and a DeepSpeed JSON, from the schema that checks them."""
    from zero_plugin.config.launch_settings import REFUSED_KEYS, WITHOUT_MEANING
    from zero_plugin.config.schema import yaml_schema

    top = dict(yaml_schema()["properties"])
    training = dict(top.pop("deepspeed_config")["properties"])
    sections = {name: schema for name, schema in training.items() if schema.get("properties")}
    launch = {name: top[name] for name in top if name not in WITHOUT_MEANING and name not in REFUSED_KEYS}
    parts = [
        "# Keys of the configuration",
        _ABOUT_KEYS,
        "## Launching\n\nKeys of a YAML file, and with `--` in front flags of `zero-plugin launch`.",
        _table(launch),
        "## Training\n\nKeys of a DeepSpeed JSON, and of `deepspeed_config` in a YAML file.",
        _table({name: schema for name, schema in training.items() if name not in sections}),
    ]
    for name, schema in sections.items():
        parts += [f"### `{name}`", schema.get("description", ""), *_section(schema)]
    refused = {name: fix for name, (_, fix) in REFUSED_KEYS.items()}
    ignored = {name: f"{why}. {fix}" for name, (why, fix) in WITHOUT_MEANING.items()}
    for title, keys in (("Keys without an effect", ignored), ("Keys that are refused", refused)):
        rows = [f"| `{name}` | {_cell(text)} |" for name, text in keys.items()]
        parts += [f"## {title}", "\n".join(["| key | what to do |", "|---|---|", *rows])]
    return "\n\n".join(filter(None, parts)) + "\n"


def _section(schema: Mapping[str, Any]) -> Iterator[str]:
    from zero_plugin.config.schema import types_of, walk_keys

    yield _table({".".join(path): key for path, key in walk_keys({**schema, "allOf": []})})
    for branch in schema.get("allOf", ()):
        keys = {".".join(path): key for path, key in walk_keys(branch["then"])}
        if keys:
            yield f"With `type` {', '.join(f'`{kind}`' for kind in sorted(types_of(branch)))}:"
            yield _table(keys)


def _table(keys: Mapping[str, Mapping[str, Any]]) -> str:
    from zero_plugin.config.tree import legal, show

    rows = ["| key | default | legal | meaning |", "|---|---|---|---|"]
    for name, schema in keys.items():
        default = f"`{_cell(show(schema['default']))}`" if "default" in schema else ""
        options = [option for option in schema.get("anyOf", ()) if option != {"const": "auto"}]
        allowed = {**schema, "anyOf": options} if options else schema
        rows.append(f"| `{name}` | {default} | {_cell(legal(allowed))} | {_cell(schema.get('description', ''))} |")
    return "\n".join(rows)


def _cell(text: str) -> str:
    """Return text for a cell of a table, with Markdown's own characters escaped."""
    return re.sub(r"([|<*_\[\]])", r"\\\1", re.sub(r"\s+", " ", text))


def commands_page() -> str:
    """Return the help of every command from tests/golden, which a test compares with the printed help."""
    parts = ["# Commands", "What `zero-plugin COMMAND --help` prints, at 80 columns."]
    helps = {"launch --help-all": "help-all", **{f.stem[5:]: f.stem for f in sorted(GOLDEN.glob("help-*.txt"))}}
    helps.pop("all")
    for command, name in sorted(helps.items()):
        text = (GOLDEN / f"{name}.txt").read_text("utf-8").partition("exit code")[0].strip()
        words = command if command.startswith("launch") else command.replace("-", " ")
        parts.append(f"## zero-plugin {words}\n\n```text\n{text}\n```")
    return "\n\n".join(parts) + "\n"
