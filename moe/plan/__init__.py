"""The plan of a run: what `auto` comes to, from facts about ranks alone."""
