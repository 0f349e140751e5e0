"""The bundled model: its shape and tokenizer, its text, and how it is trained."""
