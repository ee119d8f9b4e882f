"""Tables and pictures of docs/plan.md: `python -m phalanx.scripts.lab.plan`."""
