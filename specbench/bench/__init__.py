"""The measuring rooms: prompts, metrics, records and the runner that fills them."""
