"""The HTTP server: one folder a protocol, over `backends.service.EngineService`. No torch."""
