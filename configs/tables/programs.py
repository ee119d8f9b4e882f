"""Programs of `scripts` that are optional capabilities, by import path of `(args) -> None`."""

SERVE = "phalanx.extras.serving.program:serve"
WATCH = "phalanx.extras.watching.program:watch"
