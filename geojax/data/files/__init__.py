"""Files of documents and conversations, read as streams.

A file is a text, which is one document, or holds records: JSON lines, CSV, Parquet, Arrow and
ArrayRecord. The columns of a record say whether it is a document or a conversation.
"""
