"""Routing of a trained model, recorded for runs that replay it."""
