"""Functions that are decorated with torch.compile while Megatron-Core is imported."""

import pytest
import torch

from phalanx.parallel.megatron.imports import compile_at_first_call


@pytest.fixture
def compiled(monkeypatch) -> list[str]:
    """Names of what the compiler has been given."""
    names: list[str] = []

    def compiler(model, **options):
        names.append(getattr(model, "__name__", type(model).__name__))
        return lambda *args: (model(*args), options)

    monkeypatch.setattr(torch, "compile", compiler)
    return names


def test_a_function_is_compiled_once_and_when_it_is_called(compiled):
    with compile_at_first_call():

        @torch.compile
        def double(x):
            """Twice x."""
            return 2 * x

        @torch.compile(dynamic=True)
        def triple(x):
            return 3 * x

    assert compiled == []
    assert (double.__name__, double.__doc__) == ("double", "Twice x.")
    assert [double(2), double(4), triple(3)] == [(4, {}), (8, {}), (9, {"dynamic": True})]
    assert compiled == ["double", "triple"]


def test_modules_and_what_comes_later_are_compiled_at_once(compiled):
    with compile_at_first_call():
        torch.compile(torch.nn.Identity())
    torch.compile(len)
    assert compiled == ["Identity", "len"]


def test_an_error_inside_leaves_torch_as_it_was(compiled):
    before = torch.compile
    with pytest.raises(ZeroDivisionError), compile_at_first_call():
        raise ZeroDivisionError
    assert torch.compile is before


@pytest.mark.slow
def test_what_megatron_core_compiles_still_computes():
    with compile_at_first_call():
        double = torch.compile(lambda x: 2 * x)
    x = torch.randn(3)
    assert torch.equal(double(x), 2 * x)
