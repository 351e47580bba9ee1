"""Which package may import which, and which names are private, read from the syntax trees; and limits of size."""

from __future__ import annotations

import ast
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SRC = ROOT / "src"
PACKAGE = "slipstream"
MAX_FILE_LINES = 450
MAX_FUNCTION_LINES = 70

BASE = {"errors", "types", "stats", "config", "paths", "version", "isolation", "lazy"}
ENGINE_API = {"engine", "engine.llm", "engine.snapshots"}
SURFACE = BASE | ENGINE_API | {"", "text", "tools", "formats.sources", "grammar.notations"}

# What the modules of each part may import, as dotted prefixes below the package; its own part is always allowed.
# The empty name is the package itself, whose lazy exports are the engine's public API.
ALLOWED: dict[str, set[str]] = {
    "": BASE | ENGINE_API,
    "version": set(),
    "errors": set(),
    "config": {"errors"},
    "paths": {"errors"},
    "types": {"errors", "config", "stats"},
    "stats": set(),
    "isolation": {"", "errors"},
    "lazy": set(),
    "text": BASE,
    "formats": BASE,
    "kernels": BASE,
    "cache": BASE | {"kernels"},
    "models": BASE | {"kernels", "formats"},
    "grammar": BASE,
    "speculative": BASE | {"kernels", "models", "cache", "grammar"},
    "engine": BASE | {"text", "formats", "kernels", "cache", "models", "speculative", "grammar"},
    "tools": BASE | ENGINE_API | {"", "text", "formats", "models", "engine.memory_estimate", "engine.block_scoring"},
    "bench": SURFACE,
    # what a pair will take is asked before it is loaded, and so is what an adapter will be called
    "server": SURFACE | {"engine.memory_estimate", "formats.adapters"},
    "cli": SURFACE | {"bench", "server"},
}
EXACT = ENGINE_API | {""}  # these name one module, not everything below it


def modules() -> dict[str, Path]:
    """Every module of the package by its dotted name below the package ('' is the package itself)."""
    found = {}
    for path in sorted((SRC / PACKAGE).rglob("*.py")):
        parts = path.relative_to(SRC / PACKAGE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def imports(tree: ast.AST, name: str, is_package: bool, known: set[str]) -> set[str]:
    """Full dotted names of all modules imported anywhere in a module, relative imports resolved."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            source = node.module or ""
            if node.level:
                here = [PACKAGE, *(name.split(".") if name else [])]
                keep = len(here) - node.level + is_package
                source = ".".join([*here[:keep], *([node.module] if node.module else [])])
            for alias in node.names:
                # `from package import module` imports the module, `from module import thing` does not
                below = f"{source}.{alias.name}"
                found.add(below if below.removeprefix(f"{PACKAGE}.") in known else source)
    return found


def ours(imported: set[str]) -> set[str]:
    inside = {name for name in imported if name == PACKAGE or name.startswith(f"{PACKAGE}.")}
    return {name.removeprefix(PACKAGE).removeprefix(".") for name in inside}


def part_of(name: str) -> str:
    return name.split(".")[0]


def permitted(importer: str, imported: str) -> bool:
    part = part_of(importer)
    if part and part_of(imported) == part:
        return True
    return any(
        imported == prefix or (prefix not in EXACT and imported.startswith(f"{prefix}.")) for prefix in ALLOWED[part]
    )


def breaches(sources: dict[str, ast.Module], packages: set[str]) -> list[str]:
    known = set(sources)
    return [
        f"{PACKAGE}.{name} imports {PACKAGE}.{other}"
        for name, tree in sources.items()
        for other in sorted(ours(imports(tree, name, name in packages, known)))
        if not permitted(name, other)
    ]


@cache
def parsed() -> tuple[dict[str, ast.Module], set[str]]:
    found = modules()
    return {name: parse(path) for name, path in found.items()}, {n for n, p in found.items() if p.stem == "__init__"}


def test_every_part_has_its_rule() -> None:
    unruled = {part_of(name) for name in modules()} - set(ALLOWED)
    assert not unruled, f"say in ALLOWED what these may import: {sorted(unruled)}"


def test_imports_respect_the_borders() -> None:
    assert not breaches(*parsed())


@pytest.mark.parametrize(
    ("importer", "line", "wrong"),
    [
        ("cli.chat", "from slipstream.models import llama", True),
        ("cli.chat", "import slipstream.kernels.cpu.torch_kernels", True),
        ("cli.chat", "from slipstream.engine.scheduler import Scheduler", True),
        ("cli.chat", "from slipstream.engine.llm import LLM", False),
        ("cli.chat", "from slipstream import LLM", False),
        ("cli.chat", "from slipstream.formats import sources", False),
        ("cli.chat", "from slipstream.formats.gguf import read", True),
        ("cli.serve", "from slipstream.server.app import create_app", False),
        ("server.app", "from slipstream.engine.llm import LLM", False),
        ("server.app", "from slipstream.cli.ui import Ui", True),
        ("server.worker", "from slipstream.engine.engine import Engine", True),
        ("server.worker", "from slipstream.kernels import matmul", True),
        ("engine.llm", "from slipstream.server.serving.jobs import Job", True),
        ("models.llama", "from ..cache import pages", True),
        ("models.llama", "from . import layers", False),
        ("models.llama", "def f():\n    from slipstream.engine import scheduler", True),
        ("speculative.accept", "from slipstream.engine import llm", True),
        ("config", "from slipstream.types import Mode", True),
        ("kernels.cpu", "from slipstream.formats.gguf import read", True),
    ],
)
def test_the_rule_sees_a_breach(importer: str, line: str, wrong: bool) -> None:
    known = (
        "cli.chat",
        "models.llama",
        "models.layers",
        "cache.pages",
        "engine.scheduler",
        "engine.llm",
        "formats.sources",
        "speculative.accept",
    )
    sources = {name: ast.Module([], []) for name in known}
    sources[importer] = ast.parse(line)
    assert bool(breaches(sources, {"models", "cache", "engine"})) is wrong


OUTSIDE = ("server", "cli", "bench", "tools")  # these parts use an engine and know nothing of its inside


def class_body(module: str, name: str) -> list[ast.stmt]:
    return next(n for n in parsed()[0][module].body if isinstance(n, ast.ClassDef) and n.name == name).body


@cache
def seen_through_engine() -> frozenset[str]:
    """What may follow `.engine.`: a public method of Engine, or a field of settings that are also called `engine`."""
    methods = {n.name for n in class_body("engine.engine", "Engine") if isinstance(n, ast.FunctionDef)}
    fields = {n.target.id for n in class_body("config", "EngineConfig") if isinstance(n, ast.AnnAssign)}  # type: ignore[union-attr]
    return frozenset(name for name in methods | fields if not name.startswith("_"))


def reach_through(tree: ast.AST) -> list[str]:
    """Attribute chains that enter an engine beyond its public methods, or another object's private attribute."""
    own_names = {"self", "cls", *(node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef))}
    found = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute):
            continue
        owner = node.value
        into_engine = isinstance(owner, ast.Attribute) and owner.attr in ("engine", "_engine")
        private = node.attr.startswith("_") and not node.attr.startswith("__")
        own = (isinstance(owner, ast.Name) and owner.id in own_names) or ast.unparse(node) == "os._exit"
        if (into_engine and node.attr not in seen_through_engine()) or (private and not own):
            found.append(f"line {node.lineno}: {ast.unparse(node)}")
    return found


def test_no_chain_reaches_through_the_engine_or_into_private_attributes() -> None:
    sources = {name: tree for name, tree in parsed()[0].items() if part_of(name) in OUTSIDE}
    assert not {name: found for name, tree in sources.items() if (found := reach_through(tree))}


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        ("llm.engine.step()", False),
        ("self._engine.snapshot().sequences", False),
        ("spec.engine.cache_tokens", False),
        ("self._engine.scheduler.waiting", True),
        ("waiting = llm.engine.scheduler", True),
        ("llm.engine.prefix.hits", True),
        ("self._queue.put(1)", False),
        ("cls._known", False),
        ("class Own:\n    pass\nOwn._known", False),
        ("llm._gpu", True),
        ("self._worker._open", True),
        ("make()._open", True),
    ],
)
def test_the_rule_sees_a_chain(line: str, wrong: bool) -> None:
    assert bool(reach_through(ast.parse(line))) is wrong


# Tests and scripts use what users and other packages can use, so that the inside may change. This many places still
# look into another object's private names. The number only ever falls.
REACH_INS = 0
OUR_PACKAGES = {PACKAGE, "tests", *(path.stem for path in (ROOT / "scripts").rglob("*.py"))}
DOCUMENTED = {"_exit", "_replace", "_asdict", "_fields", "_make"}  # names of Python's own that are public nevertheless
BY_NAME = {"setattr", "getattr", "delattr", "hasattr", "patch", "object"}  # calls that name an attribute in a string


def foreign_names(tree: ast.AST) -> set[str]:
    """What a file imports from other projects, whose private names are not ours to make public."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {a.asname or a.name.split(".")[0] for a in node.names if part_of(a.name) not in OUR_PACKAGES}
        elif isinstance(node, ast.ImportFrom) and not node.level and part_of(node.module or "") not in OUR_PACKAGES:
            found |= {alias.asname or alias.name for alias in node.names}
    return found


def root_of(node: ast.AST) -> str | None:
    """The name that a chain of attributes begins with; None if it begins with something else, such as a call."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name not in DOCUMENTED


def named_privately(call: ast.Call) -> list[str]:
    """Private names that a call such as `setattr(owner, "_name", value)` or `patch("module._name")` has as strings."""
    function = call.func.attr if isinstance(call.func, ast.Attribute) else root_of(call.func)
    texts = [each.value for each in call.args[:2] if isinstance(each, ast.Constant) and isinstance(each.value, str)]
    return [text for text in texts if function in BY_NAME and is_private(text.split(".")[-1])]


def reach_ins(tree: ast.AST) -> list[str]:
    """The places where a file looks into private names of objects and modules that are not its own."""
    own_classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    inside = {id(node) for own in own_classes for node in ast.walk(own)}
    foreign, own_names = foreign_names(tree), {own.name for own in own_classes}
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            itself = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls") and id(node) in inside
            if not itself and root_of(node) not in foreign and ast.unparse(node.value) not in own_names:
                found.append(f"line {node.lineno}: {ast.unparse(node)}")
        elif isinstance(node, ast.ImportFrom) and not (foreign & {each.asname or each.name for each in node.names}):
            found += [f"line {node.lineno}: import {each.name}" for each in node.names if is_private(each.name)]
        elif isinstance(node, ast.Call) and node.args and root_of(node.args[0]) not in foreign:
            found += [f"line {node.lineno}: '{name}'" for name in named_privately(node)]
    return found


def test_tests_and_scripts_look_into_private_names_ever_less() -> None:
    files = sorted(path for part in ("tests", "scripts") for path in (ROOT / part).rglob("*.py"))
    found = [f"{path.relative_to(ROOT)}, {place}" for path in files for place in reach_ins(parse(path))]
    listed = "\n".join(found)
    assert len(found) <= REACH_INS, f"{len(found)} places look into private names:\n{listed}"
    assert len(found) == REACH_INS, f"only {len(found)} places are left: set REACH_INS to {len(found)}"


@pytest.mark.parametrize(
    ("text", "reaches"),
    [
        ("llm._target", True),
        ("llm.engine._sequences['a'].state", True),
        ("planner_of(llm)._gate.drafts(1)", True),
        ("from slipstream.engine.llm import _collect", True),
        ("from tests.tiny import _layer", True),
        ("monkeypatch.setattr(machine, '_probe', 1)", True),
        ("patch.object(llm, '_target')", True),
        ("patch('slipstream.bench.measure._answer')", True),
        ("getattr(llm, '_target')", True),
        ("def commit(self):\n    self._memory.clear()", True),
        ("class Own:\n    def use(self):\n        return self._own + Own._shared", False),
        ("class Own:\n    def use(self):\n        return self.llm._target", True),
        ("os._exit(1)", False),
        ("shape._replace(rows=2)", False),
        ("llm.__class__", False),
        ("setattr(llm, 'target', 1)", False),
        ("import gguf\ngguf.quants._traits", False),
        ("import dflash.model as authors\nauthors._make_cache()", False),
        ("import dflash.model as authors\npatch.object(authors, '_cuda_time', 1)", False),
        ("import slipstream.lazy as lazy\nlazy._hidden", True),
    ],
)
def test_the_rule_sees_a_reach_in(text: str, reaches: bool) -> None:
    assert bool(reach_ins(ast.parse(text))) is reaches


def test_apis_are_the_server_s_outermost_room() -> None:
    """What serves and what operates a server knows no API's field names; lifecycle and app put the rooms together."""
    sources, packages = parsed()
    for name, tree in sources.items():
        if name.startswith(("server.serving.", "server.operations.")):
            imported = ours(imports(tree, name, name in packages, set(sources)))
            wrong = {other for other in imported if other.startswith(("server.apis", "server.app", "server.lifecycle"))}
            assert not wrong, f"{name} imports {wrong}"


def test_the_scheduler_never_reaches_torch() -> None:
    sources, packages = parsed()
    known, todo, seen = set(sources), ["engine.scheduler"], set[str]()
    while todo:
        name = todo.pop()
        if name in seen or name not in sources:
            continue
        seen.add(name)
        imported = imports(sources[name], name, name in packages, known)
        assert not {n for n in imported if n.split(".")[0] == "torch"}, f"{PACKAGE}.{name} imports torch"
        # Importing a.b.c runs a, a.b and a.b.c; the package's own __init__ is lazy about the engine and left out.
        for other in ours(imported) | {name}:
            pieces = other.split(".")
            todo += [".".join(pieces[:i]) for i in range(1, len(pieces) + 1)]
    assert "engine.scheduler" in seen


def test_importing_the_package_does_not_import_torch_or_the_engine() -> None:
    sources, packages = parsed()
    top_level = ast.Module([n for n in sources[""].body if not isinstance(n, ast.If | ast.FunctionDef)], [])
    assert ours(imports(top_level, "", "" in packages, set(sources))) <= BASE


def test_modules_and_public_classes_have_names_of_their_own() -> None:
    """A reader who searches for a name finds one thing."""
    paths = [path for path in (SRC / PACKAGE).rglob("*.py") if path.stem != "__init__"]
    trees = [ast.parse(path.read_text()) for path in paths]
    classes = [node.name for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    names = [path.stem for path in paths] + [name for name in classes if not name.startswith("_")]
    assert [name for name, count in Counter(names).items() if count > 1] == []


@pytest.mark.parametrize("path", modules().values(), ids=lambda path: str(path.relative_to(SRC / PACKAGE)))
def test_files_and_functions_stay_readable(path: Path) -> None:
    lines = len(path.read_text(encoding="utf-8").splitlines())
    assert lines <= MAX_FILE_LINES, f"{lines} lines"
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            assert length <= MAX_FUNCTION_LINES, f"{node.name} has {length} lines"
