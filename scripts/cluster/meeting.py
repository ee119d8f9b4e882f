"""Meeting of the ranks in a store, with the names of those that do not come."""

import datetime
import json
import os
import socket
import time
from collections.abc import Mapping, Sequence

import torch.distributed as dist

from phalanx.parallel.fault.same_settings import ranges

_PERIOD = 0.05  # seconds between two looks at who is here
_RETRY = 0.5  # seconds between two attempts to connect
_HEARD = 1.0  # seconds in which the others have read rank 0's answer, whose store ends with it
_PATIENCE = 5.0  # seconds that rank 0 waits for the others at the end
_NAMED = 8  # hosts in a message


class NotMet(ValueError):
    """Ranks are missing, or cannot work together; the message names them."""


class Unreachable(NotMet):
    """This rank does not reach rank 0, whose address the message has."""


def meet(rank: int, world: int, timeout: float) -> dist.Store:
    """Wait `timeout` seconds for all ranks, and return the store of the job.

    Raises:
        NotMet: ranks are missing; on all that came, with the same message.
        Unreachable: this one does not reach rank 0.
    """
    limit, begin = datetime.timedelta(seconds=timeout), time.monotonic()
    address = os.environ.get("MASTER_ADDR", "localhost")
    port = int(os.environ.get("MASTER_PORT", "0"))
    hosted = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    hosts = rank == 0 and not hosted
    try:
        if not hosts:
            _connect(address, port, begin + timeout)
        tcp = dist.TCPStore(
            address,
            port,
            world,
            is_master=hosts,
            timeout=limit,
            wait_for_workers=False,  # a count of ranks names none
            multi_tenant=True,
        )
    except (dist.DistError, RuntimeError, OSError) as error:
        raise Unreachable(_unreachable(rank, address, port, timeout, error)) from None
    store = dist.PrefixStore(f"check_{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", tcp)
    store.set_timeout(datetime.timedelta(seconds=timeout + 10))  # rank 0 answers by then
    try:
        store.set(f"here/{rank}", socket.gethostname())
        if rank == 0:
            store.set("absent", json.dumps(_absent(store, world, timeout)))
        absent = json.loads(store.get("absent"))
    except (dist.DistError, RuntimeError) as error:
        raise Unreachable(_unreachable(rank, address, port, timeout, error)) from None
    if absent:
        if rank == 0:
            time.sleep(_HEARD)
        here = {r: store.get(f"here/{r}").decode() for r in range(world) if r not in absent}
        local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        raise NotMet(absence(absent, here, local, timeout))
    return store


def leave(store: dist.Store, rank: int, world: int) -> None:
    """End after the other ranks do not need this one any more, or some seconds later."""
    count, until = store.add("left", 1), time.monotonic() + _PATIENCE
    if rank == 0:  # its process may host the store
        while count < world and time.monotonic() < until:
            time.sleep(_PERIOD)
            count = store.add("left", 0)


def _connect(address: str, port: int, until: float) -> None:
    """Wait until the store is there, or raise OSError: torch fills pages when it waits in vain."""
    while True:
        left = until - time.monotonic()
        try:
            socket.create_connection((address, port), max(left, _PERIOD)).close()
            return
        except OSError:
            if time.monotonic() + _RETRY > until:
                raise
        time.sleep(_RETRY)


def _absent(store: dist.Store, world: int, timeout: float) -> list[int]:
    keys, until = [f"here/{rank}" for rank in range(world)], time.monotonic() + timeout
    while not store.check(keys):
        if time.monotonic() > until:
            return [rank for rank, key in enumerate(keys) if not store.check([key])]
        time.sleep(_PERIOD)
    return []


def absence(absent: Sequence[int], here: Mapping[int, str], local: int, timeout: float) -> str:
    """Message about ranks that did not come, of hosts `here` with `local` ranks of a node."""
    nodes = sorted({rank // local for rank in absent})
    hosts: dict[str, list[int]] = {}
    for rank, host in sorted(here.items()):
        hosts.setdefault(host, []).append(rank)
    came = [f"{host} ({ranges(ranks)})" for host, ranks in list(hosts.items())[:_NAMED]]
    more = f" and {len(hosts) - _NAMED} more hosts" if len(hosts) > _NAMED else ""
    return (
        f"rank{'s' * (len(absent) > 1)} {ranges(absent)}, on node{'s' * (len(nodes) > 1)} "
        f"{ranges(nodes)} of the launch counted from 0, did not come within {timeout:g} s; "
        f"here are the ranks of {', '.join(came)}{more}"
    )


def _unreachable(rank: int, address: str, port: int, timeout: float, error: Exception) -> str:
    reason = (str(error).splitlines() or [repr(error)])[0]
    return (
        f"rank {rank} on {socket.gethostname()} cannot reach rank 0 at {address}:{port} within "
        f"{timeout:g} s (MASTER_ADDR, MASTER_PORT, firewall): {reason}"
    )
