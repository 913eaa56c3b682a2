"""What every gRPC peer needs, below the clients: channels, errors <-> status codes, framing of raw bytes."""
