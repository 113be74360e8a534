"""The doctor: who will fail with a pair, how, and what to do, from configs and tensor headers alone.

`diagnosis.diagnose` runs the checks of the other modules and returns a `findings.Report`; `pages.toml` holds what is known about each code.
"""
