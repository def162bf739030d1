"""README and docs are true: configs pass the check, quotations match the script, links resolve."""

import ast
import importlib.util
import re
from pathlib import Path

import pytest
from pages import PAGES, ROOT, blocks_of

from zero_plugin.config.check import check_document
from zero_plugin.config.keys import LaunchSettings
from zero_plugin.config.read import read_document
from zero_plugin.config.schema import deepspeed_schema, walk_keys

_spec = importlib.util.spec_from_file_location("docs_hooks", ROOT / "docs/hooks.py")
assert _spec is not None
assert _spec.loader is not None
hooks = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(hooks)
_LINK = re.compile(r"\]\(([^)\s]+)\)|^\[[^\]]+\]: (\S+)$", flags=re.MULTILINE)


def text_of(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def blocks(language: str, text: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)


def anchors(text: str) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    without_code = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", without_code, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("language", ["yaml", "json"])
def test_configs_pass_the_check(language: str, tmp_path: Path) -> None:
    """Every printed config is accepted as it is, unless its name says that it is wrong or a model's."""
    examples = [block for page in PAGES for block in blocks_of(page) if block.language == language]
    examples = [block.text for block in examples if not re.search(r"wrong|/config\.json", block.file or "")]
    examples = [text for text in examples if not text.startswith("apiVersion:")]  # manifests of Kubernetes
    assert examples
    for example in examples:
        file = tmp_path / f"example.{language}"
        file.write_text(example)
        check_document(read_document(str(file)))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    """Each link within the repository names an existing file, and a heading of that file."""
    for match in _LINK.finditer(page.read_text(encoding="utf-8")):
        target = match[1] or match[2]
        if "://" in target:
            continue
        file, _, anchor = target.partition("#")
        linked = page.parent / file if file else page
        assert linked.exists(), target
        assert not anchor or anchor in anchors(linked.read_text(encoding="utf-8")), target


def test_the_readme_names_every_page_and_is_short() -> None:
    """The README links every page of docs, and is short enough to read in one go."""
    readme = text_of("README.md")
    assert [page.name for page in PAGES[1:] if page.name not in readme and "internals" not in page.name] == []
    assert len(readme.splitlines()) <= 250


def test_messages_of_the_troubleshooting_are_the_packages() -> None:
    """Each message that the page explains is a text of the package, apart from the variable parts."""
    source = "\n".join(file.read_text(encoding="utf-8") for file in (ROOT / "zero_plugin").rglob("*.py"))
    said = re.sub(r"""["']\s*\n\s*f?["']""", "", source)  # as one text, if it is written over several lines
    messages = re.findall(r"^\| `([^`]+)` \|", text_of("docs/troubleshooting.md"), flags=re.MULTILINE)
    assert len(messages) > 30
    parts = [part.strip() for message in messages for part in message.split("…")]
    assert [part for part in parts if part not in said] == []


def test_the_site_has_every_key_and_every_command() -> None:
    """The page of keys is generated from the schema, the page of commands from their help. None is missing."""
    keys = hooks.configuration_page()
    wanted = {*LaunchSettings.model_fields, *deepspeed_schema()["properties"]}
    wanted |= {path[-1] for path, _ in walk_keys(deepspeed_schema()["properties"]["zero_optimization"])}
    assert sorted(key for key in wanted if not re.search(rf"`(\w+\.)*{key}`", keys)) == []
    commands = hooks.commands_page()
    assert "## zero-plugin launch --help-all" in commands
    assert "## zero-plugin checkpoint export" in commands


def test_links_of_the_site_lead_to_pages() -> None:
    """A link between files of the repository becomes a link between pages of the site. Code and anchors stay."""
    assert hooks.link_pages("[a](docs/demo.md#b) [c](CHANGELOG.md)", "README.md", "index.md") == (
        "[a](demo.md#b) [c](changelog.md)"
    )
    page = "[a](../README.md) [b](../zero_plugin/demo/train.py)\n```\n[c](../README.md)\n```"
    assert hooks.link_pages(page, "docs/demo.md", "demo.md") == (
        "[a](index.md) [b](source/zero_plugin-demo-train.py.md)\n```\n[c](../README.md)\n```"
    )
    folder = hooks.link_pages("[a](../../examples)", "docs/tutorial/x.md", "tutorial/x.md")
    assert folder == "[a](../source/examples.md)"


def test_quotations_are_the_scripts_own_lines() -> None:
    """Each line that the demo's explanation quotes is in the script, comments excepted."""
    script = (ROOT / "zero_plugin/demo/train.py").read_text()
    script_lines = {line.partition("  #")[0].strip() for line in script.splitlines()}
    explanation = text_of("docs/demo.md").partition("The weights load into the plain module")[0]
    quoted = [line.strip() for block in blocks("python", explanation) for line in block.splitlines()]
    assert len(quoted) > 15
    assert [line for line in quoted if line not in script_lines] == []


def test_tree_lists_packages_and_top_modules_with_the_sentence_of_their_docstring() -> None:
    """The tree's lines are exactly the first sentences of packages and top-level modules."""
    package = ROOT / "zero_plugin"
    files = {file.name: file for file in package.glob("[!_]*.py")}
    files |= {f"{file.parent.relative_to(package)}/": file for file in package.glob("*/**/__init__.py")}
    wanted = {_line(name, file) for name, file in files.items() if "schema" not in name and "rules" not in name}
    architecture = text_of("docs/architecture.md")
    tree = architecture.partition("## The files")[2].partition("\nzero_plugin/")[2].partition("```")[0]
    listed = {" ".join(line.split()) for line in tree.splitlines() if line.strip()}
    assert {"missing": sorted(wanted - listed), "too many": sorted(listed - wanted)} == {
        "missing": [],
        "too many": [],
    }


def _line(name: str, file: Path) -> str:
    docstring = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    return " ".join(f"{name} {docstring.splitlines()[0].rstrip('.')}".split())
