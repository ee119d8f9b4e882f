"""Print every published run that can be estimated."""

from phalanx.configs.records import published
from phalanx.scripts.lab.peers.simulated import simulated, table

if __name__ == "__main__":
    print(table([simulated(record) for record in published() if record.stack]))
