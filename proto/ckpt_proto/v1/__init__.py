"""Wire and disk messages of ckpt; everything below is generated from the .proto files beside it."""
