"""Former place of modules of `narrowgauge.lab`."""
