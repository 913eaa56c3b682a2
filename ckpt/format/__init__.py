"""What is on disk and in the bucket: ids, keys, envelope, layout arithmetic, segments."""
