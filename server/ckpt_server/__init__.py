"""The staging server of a node: uploads, commits, retains, serves restores."""
