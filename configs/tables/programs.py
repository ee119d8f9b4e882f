"""Programs that are optional capabilities, by import path."""

SERVE = "phalanx.extras.serving.program:serve"  # `(args) -> None`
WATCH = "phalanx.extras.watching.program:watch"  # `(args) -> None`
HELP = "phalanx.extras.help.page:page"  # `(names of groups and knobs) -> text`
