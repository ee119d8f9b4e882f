"""Which transports replicate experts, and what the start page says of it."""

from unittest import mock

import pytest

from phalanx.configs.tables.transports import TRANSPORTS
from phalanx.extras.replication.kernels.replication_plan import ReplicationSize
from phalanx.extras.replication.options import (
    CopyCosts,
    ReplicationOptions,
    replication_line,
    with_replication,
)
from phalanx.parallel.dispatcher.transport import LOCAL
from phalanx.parallel.dispatcher.transport_class import Transport
from tests.support.additions import COUNTING_TRANSPORTS


@mock.patch.dict(TRANSPORTS, COUNTING_TRANSPORTS)
def test_replication_where_the_transport_has_them() -> None:
    how = dict(local=8, costs=CopyCosts(300, 40), keep=False)
    dense, pushed = Transport("alltoall", "auto"), Transport("symm", "auto")
    with_two = with_replication(2, dense, ranks=4, **how)
    options = ReplicationOptions(2, 300, least=40)
    assert with_two.replication == options
    assert options.size(4) == ReplicationSize(4, 2, 300, least=40)
    for wanted in (0, "auto"):
        for transport in (dense, pushed):
            assert with_replication(wanted, transport, ranks=4, **how) == transport
    assert with_replication(2, LOCAL, ranks=1, **how) == LOCAL
    assert with_replication(1, pushed, ranks=2, **how).replication == ReplicationOptions(
        1, 300, least=40
    )
    with pytest.raises(
        ValueError, match="broadcasts cannot replicate experts; set parallel.dispatch=auto"
    ):
        with_replication(2, Transport("broadcasts", "wanted"), ranks=4, **how)
    with pytest.raises(ValueError, match="serves 512 experts on 8 ranks, not 128 on 16: set "):
        with_replication(2, dense, ranks=16, **how)
    with pytest.raises(ValueError, match="not 520 on 8: set parallel.expert_replication=0"):
        with_replication(2, dense, ranks=8, **how | {"local": 65})
    line = replication_line(2, with_two)
    assert line.backend == "2 slots" and "a copy costs 300 rows" in line.reason


def test_over_nodes_the_transport_inside_replicates() -> None:
    pushed = Transport("hier", "auto", Transport("symm", ""))
    two = with_replication(2, pushed, ranks=2, local=8, costs=CopyCosts(300, 40), keep=True)
    assert two.replication is None and two.inside == Transport(
        "symm", "", replication=ReplicationOptions(2, 300, True, 40)
    )
    line = replication_line(2, two)
    assert line.backend == "2 slots"
    assert line.reason.startswith(
        "parallel.expert_replication=2; in each node by itself; a copy costs 300 rows"
    )
    assert "rows and a layer with copies 40; weights are saved" in line.reason
