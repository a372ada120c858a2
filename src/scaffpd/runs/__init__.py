"""Runs as commands make them: a settings file or a table in, a folder with everything about the run out."""
