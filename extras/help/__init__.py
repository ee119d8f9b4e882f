"""`train.py --help <group>` and `--help <knob>`: knobs with defaults and meanings."""
