"""Chat completions and text completions: views that keep nothing."""
