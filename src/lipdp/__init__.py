"""lipdp."""
