"""The gRPC service, its clients, the command line and the HTTP side."""
