"""Limits on the size of folders, signatures and the README."""

import ast
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
CODE = ("configs", "extras", "kernels", "moe", "parallel", "scripts", "tests")
MOST_FILES, MOST_PARAMETERS, MOST_README_LINES = 18, 10, 200
KERNEL_DECORATORS = {"jit", "kernel"}
"""Last names of decorators of kernels: `triton.jit`, `cute.jit`, `cute.kernel`."""

LONG_SIGNATURES = {
    "kernels/functional/custom_ops.py: grouped_mlp": 12,
    "kernels/functional/custom_ops.py: grouped_mlp_backward": 13,
    "extras/linear_attention/gradients_triton.py: gradients": 11,
    "kernels/sm90/experts/fc1_act.py: fc1_act": 13,
    "kernels/sm90/experts/fc2_dgrad_dact.py: fc2_dgrad_dact": 12,
    "kernels/sm90/experts/grouped_gemm.py: grouped_gemm": 11,
    "kernels/sm90/wgrad/wgrad.py: wgrad": 12,
}
"""Functions above the limit, and their parameters: these numbers may only shrink."""


def files() -> list[Path]:
    return [ROOT / "train.py", *(p for name in CODE for p in (ROOT / name).rglob("*.py"))]


def crowded_folders(paths: list[Path]) -> dict[str, int]:
    """Folders with more Python files than allowed."""
    counts = Counter(str(path.parent) for path in paths)
    return {folder: count for folder, count in counts.items() if count > MOST_FILES}


def long_signatures(text: str) -> dict[str, int]:
    """Functions, except kernels, with more parameters than allowed, without `self` and `cls`."""
    return {
        function.name: count
        for function, is_kernel in _functions(ast.parse(text), in_kernel_class=False)
        if not is_kernel and (count := _parameters(function)) > MOST_PARAMETERS
    }


def _functions(
    node: ast.AST, *, in_kernel_class: bool
) -> list[tuple[ast.FunctionDef | ast.AsyncFunctionDef, bool]]:
    """All functions of a tree; true with those that are kernels, or methods of a kernel's class."""
    found = []
    for child in ast.iter_child_nodes(node):
        inside = in_kernel_class
        if isinstance(child, ast.ClassDef):
            inside = inside or any(
                _is_kernel(method) for method in child.body if isinstance(method, ast.FunctionDef)
            )
        elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            inside = inside or _is_kernel(child)
            found.append((child, inside))
        found += _functions(child, in_kernel_class=inside)
    return found


def _is_kernel(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    names = (ast.unparse(d).split("(")[0].split(".")[-1] for d in function.decorator_list)
    return not KERNEL_DECORATORS.isdisjoint(names)


def _parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    a = function.args
    names = [x.arg for x in (*a.posonlyargs, *a.args, *a.kwonlyargs)]
    return len(names) - (names[:1] in (["self"], ["cls"])) + bool(a.vararg) + bool(a.kwarg)


def test_no_folder_is_crowded() -> None:
    crowded = crowded_folders([path.relative_to(ROOT) for path in files()])
    assert crowded == {}, f"more than {MOST_FILES} files: make sub-folders"


def test_no_signature_is_long() -> None:
    grown = {
        f"{path.relative_to(ROOT)}: {name} ({count})"
        for path in files()
        if "tests" not in path.relative_to(ROOT).parts  # stand-ins have their original's signature
        for name, count in long_signatures(path.read_text("utf-8")).items()
        if count > LONG_SIGNATURES.get(f"{path.relative_to(ROOT)}: {name}", 0)
    }
    assert grown == set(), f"more than {MOST_PARAMETERS} parameters: pass an options object"


def test_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text("utf-8").splitlines()) <= MOST_README_LINES


def test_a_crowded_folder_is_found() -> None:
    paths = [Path(f"a/{i}.py") for i in range(MOST_FILES + 1)]
    assert crowded_folders(paths) == {"a": MOST_FILES + 1}
    assert crowded_folders(paths[1:]) == {}


@pytest.mark.parametrize(
    ("text", "long"),
    [
        ("def f({}): ...", 1),
        ("def outer():\n  def f(*, {}): ...", 1),
        ("class A:\n  def f(self, {}): ...", 1),
        ("@triton.jit\ndef f({}): ...", 0),
        ("@cute.kernel\ndef f(a):\n  def g({}): ...", 0),
        ("class A:\n  def f(self, {}): ...\n  @cute.jit\n  def g(self): ...", 0),
    ],
)
def test_a_long_signature_is_found(text: str, long: int) -> None:
    most = ", ".join(f"x{i}" for i in range(MOST_PARAMETERS))
    assert long_signatures(text.format(most)) == {}
    assert len(long_signatures(text.format(f"{most}, y"))) == long
