"""Arguments of flash-attn-4 and rejected inputs, without a GPU."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from phalanx.kernels.core_attention import fa4, fa4_library
from phalanx.kernels.core_attention.documents import Documents
from phalanx.kernels.limits import unsupported_heads


def heads(S=4, T=4, H=4, G=2, d=64, v=64, B=2, dtype=torch.bfloat16, device="cpu"):
    def empty(*shape):
        return torch.empty(*shape, dtype=dtype, device=device)

    return empty(S, B, H, d), empty(T, B, G, d), empty(T, B, G, v)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (heads(dtype=torch.float32), "needs bf16, not torch.float32"),
        (heads(), "needs CUDA capability 9.0"),
    ],
)
def test_what_it_cannot_take_is_refused(given, words):
    with pytest.raises(ValueError, match=f"kernels.attention=fa4 {words}"):
        fa4.attention(*given, scale=0.1)


@pytest.mark.parametrize(
    ("d", "v", "grouped", "words"),
    [
        (64, 64, True, None),
        (128, 128, True, None),
        (32, 32, True, None),
        (256, 256, True, None),
        (192, 128, False, None),
        (96, 64, False, None),
        (192, 128, True, "values as wide as keys"),
        (80, 80, False, "multiples of 32, not 80"),
        (16, 16, True, "32 to 256 channels"),
        (48, 32, False, "multiples of 32, not 48"),
        (288, 288, False, "32 to 256 channels"),
        (64, 128, False, "no kernel for keys of 64 channels with values of 128"),
        (64, 32, False, "no kernel"),
        (256, 128, False, "no kernel"),
    ],
)
def test_widths_of_heads(d, v, grouped, words):
    why = unsupported_heads(d, v, grouped=grouped)
    assert why is None if words is None else words in why


@pytest.mark.parametrize(("window", "left"), [(0, None), (1, 0), (128, 127)])
def test_a_window_counts_the_query_itself(window, left):
    mask = fa4._mask(window)
    assert mask["causal"] and mask.get("window_size_left") == left
    assert mask.get("window_size_right") == (None if left is None else 0)


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("sinks", [None, torch.bfloat16, torch.float32])
def test_shapes_of_what_it_returns(sinks, batch_first):
    """In the layout that the next projection reads; the library checks what it is given."""
    pytest.importorskip("flash_attn.cute")
    with fa4.without_gpu(), FakeTensorMode(), fa4_library.named() as kernels:
        q, k, v = heads(S=3, T=5, H=4, G=4, d=192, v=128, device="cuda")
        s = None if sinks is None else torch.zeros(4, dtype=sinks, device="cuda")
        options = None, batch_first
        out, lse = fa4.run_forward(q, k, v, s, 0.1, 0, *options)
        assert out.shape == (3, 2, 4, 128) and out.dtype == q.dtype
        assert ordered(out, batch_first).is_contiguous()
        assert lse.shape == (2, 4, 3) and lse.dtype == torch.float32
        gradients = fa4.run_backward(out.clone(), [q, k, v, out, lse], s, 0.1, 0, False, *options)
    for given, gradient in zip([q, k, v, *([] if s is None else [s])], gradients, strict=True):
        assert gradient.shape == given.shape and gradient.dtype == given.dtype
        assert ordered(gradient, batch_first).is_contiguous()
    assert len(kernels) == 4


def ordered(x, batch_first):
    """x with its axes in the order of memory that is expected."""
    return x.transpose(0, 1) if batch_first and x.ndim == 4 else x


@pytest.mark.parametrize("sinks", [None, torch.bfloat16])
@pytest.mark.parametrize(("window", "deterministic"), [(0, False), (64, True)])
def test_documents_take_the_interface_of_various_lengths(sinks, window, deterministic):
    """The library checks shapes of tensors, bounds and log-sums; other kernels are asked for."""
    pytest.importorskip("flash_attn.cute")
    with fa4.without_gpu(), FakeTensorMode():
        q, k, v = heads(S=200, T=200, H=4, G=2, B=1, device="cuda")
        s = None if sinks is None else torch.zeros(4, dtype=sinks, device="cuda")
        position = torch.zeros(200, dtype=torch.int64, device="cuda")
        asked = []
        for documents in (None, Documents(position, places=16, longest=100)):
            with fa4_library.named() as kernels:
                out, lse = fa4.run_forward(q, k, v, s, 0.1, window, documents)
                saved, how = [q, k, v, out, lse], (0.1, window, deterministic, documents)
                gradients = fa4.run_backward(torch.ones_like(out), saved, s, *how)
            asked.append(kernels)
            assert out.shape == q.shape and out.is_contiguous()
            assert lse.shape == ((1, 4, 200) if documents is None else (4, 200))
            for given, gradient in zip(
                [q, k, v, *([] if s is None else [s])], gradients, strict=True
            ):
                assert gradient.shape == given.shape and gradient.is_contiguous()
    whole, packed = asked
    assert len(whole) == len(packed) >= 4 and not whole & packed


def test_documents_need_bounds():
    assert fa4._lengths(None) == {}
    documents = Documents(torch.zeros(4, dtype=torch.int64), places=4, longest=1)
    lengths = fa4._lengths(documents)
    assert lengths["cu_seqlens_q"] is lengths["cu_seqlens_k"] is documents.bounds_N1
    assert lengths["max_seqlen_q"] == lengths["max_seqlen_k"] == 1


def test_tensors_are_read_where_they_are():
    kv = torch.empty(5, 2, 4, 48, dtype=torch.bfloat16)
    value = kv[..., 32:]
    assert fa4._readable(value) is value
    assert fa4._readable(value.transpose(2, 3)).stride(-1) == 1
    assert 0 not in fa4._readable(torch.empty(5, 2, 1, 16).expand(5, 2, 4, 16)).stride()
