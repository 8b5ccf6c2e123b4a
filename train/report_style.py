"""The style sheet of a run's page."""

STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; color: #1b1f24; max-width: 1120px; margin: 24px auto; padding: 0 20px }
h1 { font-size: 24px; margin: 0 0 12px } h2 { font-size: 17px; margin: 28px 0 8px }
.tiles { display: flex; flex-wrap: wrap; gap: 12px }
.tiles div { border: 1px solid #d8dee4; border-radius: 6px; padding: 8px 14px; color: #57606a; font-size: 13px }
.tiles b { display: block; font-size: 21px; color: #1b1f24 }
.charts { display: flex; flex-wrap: wrap; gap: 18px; margin-top: 18px }
figure { flex: 1 1 440px; max-width: 540px; margin: 0 } figcaption { font-weight: 600 }
.legend { min-height: 20px; font-size: 13px; color: #57606a }
.legend span { margin-right: 14px } .legend i { display: inline-block; width: 14px; height: 3px; margin: 0 5px 4px 0 }
svg { width: 100%; height: auto }
article { border: 1px solid #d8dee4; border-radius: 6px; padding: 4px 14px; margin: 10px 0; white-space: pre-wrap }
article p { margin: 8px 0 } .prompt, .share { color: #57606a } .share { font-size: 13px }
mark { background: #cfe6ff; color: inherit; border-radius: 3px }
table { border-collapse: collapse; font-size: 13px }
th, td { text-align: left; padding: 2px 14px 2px 0; vertical-align: top }
th { font-weight: 500; color: #57606a; white-space: nowrap } td { overflow-wrap: anywhere }
pre { background: #f6f8fa; padding: 10px 14px; border-radius: 6px; white-space: pre-wrap; overflow-wrap: anywhere }
"""
