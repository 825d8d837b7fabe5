"""Plain torch: short, the truth that every other implementation is tested against."""
