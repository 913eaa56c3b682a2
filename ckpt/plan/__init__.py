"""Pure decisions: who writes what, who reads what, what is kept."""
