"""Files of tokenizers as people have them, each turned into the content of a `tokenizer.json`.

`reading.read_tokenizer` tells the kinds apart; every kind has a module. Equal files give equal
bytes, whichever release of Python or of the `tokenizers` library reads them.
"""
