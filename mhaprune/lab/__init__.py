"""The lab, which the command line needs: experiments and reports, runs, sources of models, the small model, its tasks.

The core never imports it, see `mhaprune.api.to_lab`.
"""
