"""Preparation of text: from the files of sources to folders of tokens.

`preparation.prepare` runs it, in worker processes, and goes on where an earlier call was killed.
"""
