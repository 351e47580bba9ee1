"""The APIs: each module translates the bodies of one API into jobs and the answers back into that API's words."""
