"""Labels, fingerprints and stable text."""
