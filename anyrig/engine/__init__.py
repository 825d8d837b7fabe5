"""The engine: plan -> inputs -> run -> sample -> detokenize, one step at a time."""
