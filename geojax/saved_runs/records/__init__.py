"""A run as the files of its directory tell it, while it goes on or afterwards; nothing is written.

The files may be those of an older run, damaged, or of somebody else: a key may be missing, a line
that is no record is counted and left out, and memory is bounded whatever the files hold.
"""
