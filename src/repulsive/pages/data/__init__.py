"""Data classes for pages and figures. They check their input and draw nothing."""
