"""Weight gradients that wait for the next exchange of the backward pass have the same bits."""

import pytest

from tests.moe.run.test_hidden_exchanges import check_bits


@pytest.mark.dist
def test_with_two_micro_batches() -> None:
    check_bits(2, ["model=tiny", "parallel.overlap_microbatches=on"])
