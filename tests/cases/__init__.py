"""Cases that tests share: refusals, cohorts, tables, silos, folders. Look here before you write a
helper.
"""
