"""The four tasks: /v1/vision/caption, ask, scene, detect."""
