"""Runs: from settings to a folder with models, one record and a page."""
