"""Chat templates, which turn conversations into text and the mask of what is learned.

A template is a program of whoever wrote the tokenizer, so it runs in a sandbox.
"""
