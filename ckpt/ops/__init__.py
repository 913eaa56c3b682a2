"""Operations on a run in a store: commit, catalog, fetch, prune, verify, pins."""
