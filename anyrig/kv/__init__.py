"""Pages of the KV cache: who owns which, and which ones a new prompt can take over. No torch here."""
