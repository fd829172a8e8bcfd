"""An engine that is another program's server: launched and watched, or attached to; spoken to over HTTP."""
