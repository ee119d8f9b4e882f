"""Print the tables of docs/published/simulated.md; with `--fit` the rates that fit best, too."""

import sys

from phalanx.configs.records import published
from phalanx.scripts.lab.peers import page
from phalanx.scripts.lab.peers.fit import fitted
from phalanx.scripts.lab.peers.simulated import Rates, simulated

if __name__ == "__main__":
    records = published()
    if "--fit" in sys.argv[1:]:
        print(fitted(records, Rates()), "\n")
    runs = [simulated(record) for record in records]
    print(page.summary(runs), page.table(runs), page.steps(runs), page.not_compared(), sep="\n\n")
