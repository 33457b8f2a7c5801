"""Plans: asked for, judged, kept, carried out, ended; beside them a shadow's."""
